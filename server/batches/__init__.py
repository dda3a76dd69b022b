"""Batches: files of requests that are worked on in the background, and files of their answers."""
