"""Which layout of the KV cache a model was measured to be quickest in, kept from one run to the next.

Beside what its ticks cost, and as little depended on: what cannot be read is measured again.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from uma_trio.engine.layout import Choice
from uma_trio.models import known_costs

log = structlog.get_logger("uma_trio.models")


class KnownLayouts:
    """Those of the model at ``model``; see ``layout.Choices``.

    Args:
        where: the folder; that of the learned costs if not given.
    """

    def __init__(self, model: Path, where: Path | None = None) -> None:
        self._model = model
        self._where = where

    def recall(self, circumstances: tuple[object, ...]) -> str | None:
        name = self._name(circumstances)
        try:
            found = known_costs.read(name, self._where)["layout"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.debug("a layout that was chosen cannot be used", name=name, reason=str(error))
            return None
        return found if isinstance(found, str) else None

    def keep(self, circumstances: tuple[object, ...], choice: Choice) -> None:
        ms = {each.layout.name: (each.decode_ms, each.mixed_ms) for each in choice.measured}
        known_costs.write(self._name(circumstances), {"layout": choice.layout.name, "ms": ms}, self._where)

    def _name(self, circumstances: tuple[object, ...]) -> str:
        return known_costs.circumstances(self._model, "layout", *circumstances)
