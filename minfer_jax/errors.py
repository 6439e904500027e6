"""Every error that minfer_jax raises on purpose.

A message is one line: what is wrong (file, key, tensor or flag, the value found, the value
allowed) and, where it helps, what to do. The command line prints it as it is.
"""


class MinferError(Exception):
    """Base of all errors of this package; the command line exits with 1 on it."""


class UsageError(MinferError):
    """A flag, argument or configuration value is wrong; the command line exits with 2."""


class GrammarError(UsageError):
    """A grammar, pattern or JSON schema is malformed, impossible, too large or not supported."""


class GGUFError(MinferError):
    """A model file is not GGUF, is damaged, or holds something that cannot be read."""


class TokenizerError(MinferError):
    """The tokenizer's metadata is inconsistent or unsupported, or a text or id is not valid."""


class ModelError(MinferError):
    """The architecture or one of its tensors or parameters is missing or not supported."""


class BatchError(MinferError):
    """A batch was refused before anything changed."""


class StateError(MinferError):
    """A saved state is damaged or foreign, does not fit, or could not be read or written; nothing
    has changed."""


class ContextFullError(MinferError):
    """A prompt does not fit into the context; raised before any compute."""


class SamplingError(MinferError):
    """There is nothing valid to sample from, or a sampler's parameter is out of range."""


class TemplateError(MinferError):
    """A chat template is missing or failed, or it refused the messages."""


class FetchError(MinferError):
    """A model could not be found or downloaded."""
