"""Competition mathematics: reading final answers and deciding whether they equal the reference."""
