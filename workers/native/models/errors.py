"""Errors of the model side of the native engine.

ModelError
├── InvalidModelError       the folder or file is incomplete, damaged or contradicts itself
├── KernelUnavailableError  the CPU kernel cannot be compiled or loaded on this machine
└── the following are ValueErrors too:
    ├── UnsupportedModelError   the architecture, rope type or option is not built here
    ├── ContextLengthError      a position beyond the model's context window
    ├── TextError               text that no tokenizer can encode
    └── ChatTemplateError       no template, or the template refused the messages
"""

from __future__ import annotations


class ModelError(Exception):
    """Root of the model side's errors; the message names the thing, the cause and the mend."""


class KernelUnavailableError(ModelError):
    """The CPU kernel cannot be compiled or loaded on this machine."""


class UnsupportedModelError(ModelError, ValueError):
    """The model asks for something that this engine does not implement."""


class InvalidModelError(ModelError):
    """A model folder or GGUF file is incomplete or contradicts itself."""


class ContextLengthError(ModelError, ValueError):
    """A position lies beyond the model's context window."""


class TextError(ModelError, ValueError):
    """Text that is not valid Unicode, such as a lone surrogate from a JSON escape."""


class ChatTemplateError(ModelError, ValueError):
    """The chat template is missing, broken, or refused the messages."""
