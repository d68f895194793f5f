"""Whether edits and compositions decide right: tasks, arms, metrics, statistics, results."""
