"""From a conversation to the text a model was trained on, by the template that its file carries.

This room handles text. It must not know token ids, models or the transport that messages came by.
"""

from minfer_jax.chat.template import ChatTemplate

__all__ = ["ChatTemplate"]
