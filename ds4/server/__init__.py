"""The HTTP server: sockets to logits and back. `http` knows bytes, `api` knows dialects, `scheduler` knows slots."""
