"""Questions that are answered by searching a collection of passages: the index, the grader and the task."""
