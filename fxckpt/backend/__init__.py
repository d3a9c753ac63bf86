"""Backend of torch.compile."""

from fxckpt.backend.api import Backend, fxckpt_backend, report

__all__ = ["Backend", "fxckpt_backend", "report"]
