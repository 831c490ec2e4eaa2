"""Functions of the operating system that the package needs: files, processes, clocks."""
