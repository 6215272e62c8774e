"""HTTP/2 (RFC 9113) and gRPC, as much of them as Envoy needs to call us."""
