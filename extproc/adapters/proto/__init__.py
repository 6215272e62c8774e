"""Generated protobuf code for the two Envoy services we speak, from .proto texts of our own."""
