"""Model servers for demos and tests over a modelled KV cache."""
