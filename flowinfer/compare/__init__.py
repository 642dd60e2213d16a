"""Two graphs under the same requests: which is faster, by how much, and whether their answers differ."""
