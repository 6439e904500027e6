"""Model families: GGUF metadata and tensors -> a `Model` that can be traced.

One small file per family with three functions (hparams, tensors, graph), found by
`general.architecture` in `registry`. Import the modules themselves: `hparams` needs no jax.
"""
