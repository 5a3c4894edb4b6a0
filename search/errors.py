"""The errors a user sees: one or two sentences, and the exit code that goes with them."""


class SearchError(Exception):
    """The search could not be carried out."""

    exit_code = 1


class UsageError(SearchError):
    """An argument or the study file is wrong; the message names the key and, for a file, the line."""

    exit_code = 2


class RefusedError(SearchError):
    """What was asked for is possible and deliberately not done."""

    exit_code = 3


class SpooledError(SearchError):
    """The database did not take a measurement, which now waits in the spool."""


class LostClaimError(SearchError):
    """A trial's place was given to another searcher, because the one that held it was not heard of for too long."""

    def __init__(self, trial: int) -> None:
        super().__init__(f"Trial {trial} was given back and is measured elsewhere: its searcher was not heard of.")
