"""Recordings of what flowed in a graph, and their replay through a part of it."""
