"""Adapters of an engine process, by the digest that the salts of its requests spell."""

from __future__ import annotations

from dataclasses import replace

from nanovllm.engine import Engine
from nanovllm.features.adapters.loading import Adapter
from nanovllm.features.adapters.opening import load_adapter, unload_adapter
from nanovllm.features.adapters.salts import AdapterSalt, client_salt, digest_in
from nanovllm.sequence import NewRequest
from nanovllm.serving.replicas.messages import AdapterLoaded, LoadAdapter


class ProcessAdapters:
    """Adapters that the front's requests may name; names are the front's alone. Used in the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._adapters: dict[str, Adapter] = {}
        self._errors: dict[str, str] = {}  # reasons why adapters that the front still serves are missing

    def load(self, order: LoadAdapter) -> AdapterLoaded:
        """Load an adapter, and keep it if it has the digest that the front expects."""
        try:
            adapter = load_adapter(self._engine, order.name, order.path)
            unload_adapter(self._engine, order.name)  # the front may give the name to another one
            if order.digest not in (None, adapter.digest):
                raise ValueError(
                    f"the adapter {order.name!r} in {order.path} has changed since it was loaded: its digest is "
                    f"{adapter.digest}, and was {order.digest}. Load it again for new requests."
                )
        except Exception as error:  # the front raises it, and this engine goes on
            message = str(error) or repr(error)
            if order.digest is not None and order.digest not in self._adapters:
                self._errors[order.digest] = message
            return AdapterLoaded(order.number, "", 0, message)
        self._errors.pop(adapter.digest, None)
        self._adapters.setdefault(adapter.digest, adapter)  # requests in progress use the slot of the first
        return AdapterLoaded(order.number, adapter.digest, adapter.rank)

    def drop(self, digest: str) -> None:
        self._adapters.pop(digest, None)
        self._errors.pop(digest, None)

    def restored(self, new: NewRequest) -> NewRequest:
        """The request with its adapter, if its salt spells one; raises ValueError if that is missing here."""
        if (digest := digest_in(new.cache_salt)) is None:
            return new
        if (adapter := self._adapters.get(digest)) is None:
            reason = self._errors.get(digest, f"no adapter with digest {digest} is loaded")
            raise ValueError(f"the request's adapter is missing in its replica: {reason}")
        return replace(new, cache_salt=AdapterSalt(adapter, client_salt(new.cache_salt)))
