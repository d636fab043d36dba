"""Errors of finding and fetching models.

ModelStoreError
├── ModelNotFoundError     nothing by this name, here or at any source
├── HubUnavailableError    the model hub is unreachable, off, or refuses this model
├── PackageInstallError    installing the package that ships the weights failed
└── DamagedModelError      what was fetched is not what was expected
"""

from __future__ import annotations


class ModelStoreError(Exception):
    """Root of the model store's errors; the message names the model, the cause and the mend."""


class ModelNotFoundError(ModelStoreError):
    """No source has a model by this name."""


class HubUnavailableError(ModelStoreError):
    """The model hub did not give the model."""


class PackageInstallError(ModelStoreError):
    """The package that ships the weights could not be installed."""


class DamagedModelError(ModelStoreError):
    """A fetched file's checksum or a folder's content is wrong."""
