"""Throughput in numbers that can be compared: tests as llama-bench names them, the machine's
bandwidth, a peer that runs in turns with us, sweeps, and the decode step by node.

Knows contexts and batches. Must not know flags, text or sampling. Import the modules themselves:
`sweep`, `plot`, `report` and `workload` need no jax.
"""
