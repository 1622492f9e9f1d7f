"""Adapters of `LLM`: loading, and requests that name them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.features.adapters.salts import salted

if TYPE_CHECKING:
    from nanovllm.features.adapters.loading import Adapter


class Adapting:
    """Mixin of `LLM`."""

    def load_adapter(self: Any, name: str, path: Any) -> Adapter:
        """Load a LoRA adapter, which requests then name, from a folder that PEFT has saved.

        A name in use names the new adapter from now on; running requests keep theirs. At most `max_loras` adapters
        compute in one step; requests of further ones wait.

        Raises ValueError, and changes nothing, for a folder that is no LoRA adapter of this model, or has a rank above
        `max_lora_rank`.
        """
        from nanovllm.features.adapters.opening import load_adapter

        with self._interrupts(), self._turn() as engine:
            return load_adapter(engine, name, path)

    def unload_adapter(self: Any, name: str) -> None:
        """Forget an adapter's name; its running requests end with it. Raises ValueError for an unknown name."""
        from nanovllm.features.adapters.opening import unload_adapter

        with self._interrupts(), self._turn() as engine:
            unload_adapter(engine, name)

    @property
    def adapters(self: Any) -> dict[str, Adapter]:
        """The loaded adapters by name."""
        return dict(self._open_engine().input_processor.parts.adapters)

    def _with_salt(self: Any, *, adapter: Any = None, cache_salt: Any = "", **options: Any) -> dict[str, Any]:
        """Options of requests, with the adapter that they name in their cache_salt."""
        return options | {"cache_salt": self._salted(adapter, cache_salt)}

    def _salted(self: Any, adapter: Any, cache_salt: Any) -> Any:
        """The cache_salt of requests that name adapters; see `salted`."""
        return salted(self._open_engine().input_processor.parts.adapters, adapter, cache_salt)
