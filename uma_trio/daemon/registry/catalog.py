"""The models by name: configured models, and models of this machine that requests have named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import structlog
import trio

from uma_trio.config import Http, Listen, Loading, Operations
from uma_trio.daemon.registry.model import Instance, Model, ModelOpener, ModelSpec
from uma_trio.errors import ModelNotFound
from uma_trio.protocol.answers import bare_name

log = structlog.get_logger("uma_trio.registry")


class Catalog:
    """The models, and what is loaded of them.  The first one is the default.

    Args:
        specs: those that are configured.
        opener: finds others.
        owner: name of the principal that runs the daemon.
    """

    def __init__(self, specs: Iterable[ModelSpec], opener: ModelOpener, owner: str) -> None:
        self._opener = opener
        self._owner = owner
        self._models = {spec.name: Model(spec) for spec in specs}
        self._removed: list[Model] = []
        """Models without a name, whose last requests are still served."""
        self._changed = trio.Event()

    @property
    def models(self) -> list[Model]:
        """All that have a name, the default one first."""
        return [*self._models.values()]

    def all(self) -> list[Model]:
        """Those without a name included."""
        return [*self._models.values(), *self._removed]

    def instances(self) -> Iterator[Instance]:
        """All copies that are loaded."""
        for model in self.all():
            yield from model.instances

    def announce(self) -> None:
        """Wake all that wait for a change of any model."""
        self._changed.set()
        self._changed = trio.Event()

    async def wait_changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    def named(self, name: str | None) -> Model | None:
        """Return the model that ``name`` means in requests; ``None`` is the name of the default model."""
        if name is None:
            return next(iter(self._models.values()))
        served = self._models.get(bare_name(name)) or self._models.get(name)
        if served is None:
            served = next((model for model in self._models.values() if name in model.spec.aliases), None)
        if served is None and ":" in name:  # MODEL:ADAPTER
            model, _, adapter = name.rpartition(":")
            served = self.named(model)
            if served is not None and adapter not in [
                configured.name for configured in served.spec.config.model.adapters
            ]:
                return None
        return served

    def may_load(self, principal: str | None) -> bool:
        """Whether requests of a principal may have models that are not configured; ``None`` is the owner."""
        if self._opener.on_demand is not None:
            return self._opener.on_demand
        return principal in (None, self._owner)

    def models_for(self, principal: str | None) -> list[Model]:
        """Those of ``models`` that requests of a principal may have."""
        may_load = self.may_load(principal)
        return [model for model in self._models.values() if may_load or model.spec.is_configured]

    async def find(self, name: str | None, principal: str | None = None) -> Model:
        """Return the model that ``name`` means in requests, also one of this machine that is not configured.

        ``None`` is the name of the default model.

        Args:
            principal: name of the one that asks; ``None`` is the owner of the daemon.

        Raises:
            ModelNotFound: there is none, or the principal may not have it.
        """
        models = self.models_for(principal)
        model = self.named(name)
        if model in models:
            return model
        assert name is not None, "there is always a default model"
        spec = await self._opener.find(name)
        if spec is None:
            raise self.not_found(name, principal)
        same = [other for other in models if other.spec.path == spec.path]
        if same:
            return same[0]
        if not self.may_load(principal):
            who = "" if principal in (None, self._owner) else " to others than the user who runs the daemon"
            remedy = (
                f"{name} is on this machine; to serve it{who}, start uma-trio serve with --on-demand or --model {name}"
            )
            raise self.not_found(name, principal, remedy)
        return self._models.setdefault(spec.name, Model(spec))

    def not_found(self, name: str, principal: str | None = None, remedy: str | None = None) -> ModelNotFound:
        """The error for a request that names an unknown model.  It lists the models that it could name."""
        served = ", ".join(model.name for model in self.models_for(principal))
        if remedy is None:
            more = ", or one that uma-trio models lists; uma-trio pull downloads others"
            remedy = f"choose one of these{more if self.may_load(principal) else ''}"
        return ModelNotFound(f"no model {name!r}; this daemon serves {served}; {remedy}", field="model")

    def update(self, specs: Iterable[ModelSpec]) -> tuple[list[Model], list[Model]]:
        """Take over what is configured now.

        Returns:
            The models that are no longer configured, and those to load: changed ones that are loaded, and added ones.
        """
        wanted = {spec.name: spec for spec in specs}
        before = self._models
        models = {name: model for name, model in before.items() if not model.spec.is_configured and name not in wanted}
        changed, added = [], []
        for name, spec in wanted.items():
            model = before.get(name)
            if model is None:
                model = Model(spec)
                added += [model] if spec.at_start else []
            elif relevant(model.spec) != relevant(spec):
                model.spec, model.memory_bytes, model.description, model.failure = spec, None, None, None
                changed.append(model)
            models[name] = model
        self._models = {name: models[name] for name in [*wanted, *models]}
        gone = [model for name, model in before.items() if name not in models]
        for model in gone:
            log.info("a model is no longer configured", model=model.name)
            model.is_removed = True
            if model.instances or model.attempt is not None:
                self._removed.append(model)
        return gone, [*(model for model in changed if model.instance is not None), *added]

    def forget_if_unused(self, model: Model) -> None:
        """Forget a model that is no longer loaded, if only its requests have made it known."""
        if not model.instances and model in self._removed:
            self._removed.remove(model)
        elif not model.spec.is_configured and model.state == "unloaded" and not model.n_waiting:
            self._models.pop(model.name, None)


def relevant(spec: ModelSpec) -> ModelSpec:
    """A model without the settings that are read once, at the start of the daemon."""
    config = attrs.evolve(spec.config, listen=Listen(), http=Http(), operations=Operations(), loading=Loading())
    return attrs.evolve(spec, config=config, at_start=True)
