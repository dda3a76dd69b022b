"""Benchmarks, each `python -m benchmarks.NAME`; with `--json` the last line is one JSON object."""
