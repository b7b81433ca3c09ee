"""How every tool fails: one line on stderr and exit code 1."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ToolError(Exception):
    """Something that the user can put right; the text is one line and says how."""


def run(command: Callable[[], int | None]) -> int:
    """Call `command` and return the exit code; a ToolError becomes one line on stderr and 1."""
    try:
        return command() or 0
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def conclude(problems: list[str], failed: str, fine: str) -> int:
    """Print a check's problems, one a line on stderr, and raise ToolError; without any, print `fine` and return 0."""
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise ToolError(f"{failed} {len(problems)} problem(s)")
    print(fine)
    return 0


@contextmanager
def hub_errors(endpoint: str) -> Iterator[None]:
    """Turn what huggingface_hub raises inside the block into a ToolError that names the endpoint."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except OfflineModeIsEnabled:
        raise ToolError(f"HF_HUB_OFFLINE is set, so the Hub at {endpoint} was not asked") from None
    except HFValidationError as error:
        raise ToolError(str(error).partition("\n")[0]) from None
    except HfHubHTTPError as error:
        reason = error.server_message or str(error).partition("\n")[0]
        raise ToolError(f"the Hub at {endpoint} refused ({error.response.status_code}): {reason}") from error
    except HTTPError as error:  # the base class: no answer at all
        raise ToolError(f"cannot reach the Hub at {endpoint}: {error}") from error
    except LocalEntryNotFoundError as error:  # how downloads report a lost connection
        raise ToolError(f"cannot download from the Hub at {endpoint}: {error.__cause__ or error}") from error
