"""The settings of the daemon.

The YAML file, the ``UMA_*`` environment variables, the flags of ``uma-trio serve`` and the tables in docs/CONFIG.md are
all derived from the fields in ``fields.py``.  Names are unique over all sections: a flag or a variable needs no section
(``--max-connections``, ``UMA_MAX_CONNECTIONS``), while the file groups settings by section::

    limits:
      max_connections: 64

Several models have a list of their own, ``models:``, with the settings that they do not share.

Flags override the environment, the environment overrides the file, and the file overrides the defaults.
"""

from uma_trio.config.fields import (
    DEFAULT_BATCH,
    DEFAULT_TARGET_ITL_MS,
    MB,
    SECTIONS,
    Adapter,
    Aici,
    Config,
    Engine,
    Files,
    Http,
    Limits,
    Listen,
    Loading,
    Model,
    ModelEntry,
    Operations,
    Sampling,
    Scheduling,
    Sessions,
)
from uma_trio.config.models import models_of, settings_of_model
from uma_trio.config.refusal import ConfigError
from uma_trio.config.sources import load, read_yaml, to_yaml
from uma_trio.config.values import Setting, settings

__all__ = [
    "DEFAULT_BATCH",
    "DEFAULT_TARGET_ITL_MS",
    "MB",
    "SECTIONS",
    "Adapter",
    "Aici",
    "Config",
    "ConfigError",
    "Engine",
    "Files",
    "Http",
    "Limits",
    "Listen",
    "Loading",
    "Model",
    "ModelEntry",
    "Operations",
    "Sampling",
    "Scheduling",
    "Sessions",
    "Setting",
    "load",
    "models_of",
    "read_yaml",
    "settings",
    "settings_of_model",
    "to_yaml",
]
