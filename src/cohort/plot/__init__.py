"""Pictures of runs: the curves of their metrics as one SVG file, several runs overlaid.

`series` reads runs, `page` draws them. Each picture is a grid of small charts, one per metric.
"""
