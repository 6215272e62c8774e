"""Prompt-cache-aware endpoint choice for Envoy, as an external processor.

core        decides: prompt identity, index, load, policies, the sans-IO stream; no I/O
adapters    talk: gRPC with Envoy, HTTP with engines, files, metrics
simulation  drives the same core in virtual time against modelled engines
standin     model servers for demos and tests
config      one file to one frozen tree; app joins the parts; cli is the command line
"""
