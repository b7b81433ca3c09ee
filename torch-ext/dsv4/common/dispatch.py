"""Pick the backend of a call: the first in order of preference that covers it, else an error with every reason."""

import functools
import importlib

MAX_PREPARED = 4096  # calls of as many signatures are remembered; a prefill of every length is a signature of its own


class Backends:
    """The backend modules of one op, named in order of preference.

    A backend module has `why_not(*args)`, which returns None if it covers the call and else one reason, and one
    function per entry point of the op, which prepares the call: it returns a function of tensors. Modules are imported
    at the first call, so that a missing `triton` is a reason and not an import error of the whole package.
    """

    def __init__(self, package: str, *names: str):
        self.package, self.names, self.prepared = package, names, {}

    def remember(self, key: tuple, call):
        """Keep a prepared call in `prepared`, where ops look it up by all that it depends on but the data. Returns it."""
        if len(self.prepared) >= MAX_PREPARED:
            self.prepared.clear()
        self.prepared[key] = call
        return call

    def choose(self, *args):
        """The first backend whose `why_not(*args)` is None. Raises NotImplementedError with every backend's reason."""
        reasons = []
        for name, module in self.modules.items():
            reason = module if isinstance(module, str) else module.why_not(*args)
            if reason is None:
                return module
            reasons.append(f"{name}: {reason}")
        raise NotImplementedError(f"no backend of {self.package.rpartition('.')[2]} covers this call; " + "; ".join(reasons))

    @functools.cached_property
    def modules(self) -> dict:
        """Each backend's module, or the reason as text where an import that it needs is not installed."""
        loaded = {}
        for name in self.names:
            try:
                loaded[name] = importlib.import_module(f".{name}", self.package)
            except ModuleNotFoundError as error:
                loaded[name] = f"{error.name} is not installed"
        return loaded
