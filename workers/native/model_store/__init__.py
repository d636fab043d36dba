"""Finding and fetching models: `resolve`, `list_models`, `model_hash`."""

from workers.native.cache_dir import default_cache_dir
from workers.native.model_store.folder import ModelFolder
from workers.native.model_store.model_hash import model_hash
from workers.native.model_store.progress import ConsoleReporter, LogReporter, Reporter
from workers.native.model_store.store import ModelListing, ModelStore, list_models, resolve

__all__ = [
    "ConsoleReporter",
    "LogReporter",
    "ModelFolder",
    "ModelListing",
    "ModelStore",
    "Reporter",
    "default_cache_dir",
    "list_models",
    "model_hash",
    "resolve",
]
