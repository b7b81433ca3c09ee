"""Pick the backend of a call: the first in order of preference that covers it, else an error with every reason."""

import functools
import importlib


class Backends:
    """The backend modules of one op, named in order of preference.

    A backend module has `why_not(*args)`, which returns None if it covers the call and else one reason, and one
    function per entry point of the op. Modules are imported at the first call, so that a missing `triton` is a reason
    and not an import error of the whole package.
    """

    def __init__(self, package: str, *names: str):
        self.package, self.names = package, names

    @functools.cached_property
    def modules(self):
        loaded = []
        for name in self.names:
            try:
                loaded.append((name, importlib.import_module(f".{name}", self.package), None))
            except ModuleNotFoundError as error:
                loaded.append((name, None, f"{error.name} is not installed"))
        return loaded

    def choose(self, *args):
        """The first backend whose `why_not(*args)` is None. Raises NotImplementedError with every backend's reason."""
        reasons = []
        for name, module, missing in self.modules:
            reason = missing or module.why_not(*args)
            if reason is None:
                return module
            reasons.append(f"{name}: {reason}")
        raise NotImplementedError(f"no backend of {self.package.rpartition('.')[2]} covers this call; " + "; ".join(reasons))
