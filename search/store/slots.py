"""Who works on what: a study's places, the settings claimed in them, and the leases of those who hold them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from sqlalchemy import Engine, delete, func, or_, select, update
from sqlalchemy.orm import sessionmaker

from search.errors import LostClaimError
from search.store.database import take_turn
from search.store.models import Searcher, Slot
from search.store.patience import patient

REFERENCE = -1  # the reference setting's trial and place


class Slots:
    """The places of one study in a study database.

    A place is taken, then a setting is claimed in it, then it is finished or given back. Whoever holds one renews a
    lease; a place whose holder's lease has run out may be taken over.

    Args:
        engine: the study database's.
        study: the study's name in it.
        note: told when the database server does not answer and is waited for.
    """

    def __init__(self, engine: Engine, study: str, note: Callable[[str], None] = lambda text: None) -> None:
        self._session = sessionmaker(engine, expire_on_commit=False)  # rows outlive their session
        self._alone = sessionmaker(engine.execution_options(alone=True), expire_on_commit=False)
        self._reading = sessionmaker(engine.execution_options(reading=True), expire_on_commit=False)
        self.study = study
        self.note = note

    @patient
    def take_slot(self, total: int, owner: str) -> int | None:
        """The smallest free place below `total`, now `owner`'s; None when every place is taken."""
        here = Slot.study == self.study, Slot.ordinal > REFERENCE
        unused = select(Slot.ordinal).where(*here, Slot.owner == owner, Slot.trial.is_(None))
        with self._session() as session, session.begin():
            if (mine := session.scalars(unused).first()) is not None:  # taken, but the answer was lost on the way
                return mine
            count, last = session.execute(select(func.count(), func.max(Slot.ordinal)).where(*here)).one()
            if count >= total:
                return None
            free: int | None = count
            if last not in (None, count - 1):  # there are gaps
                taken = set(session.scalars(select(Slot.ordinal).where(*here)))
                free = next((n for n in range(total) if n not in taken), None)
            if free is not None:
                session.add(Slot(study=self.study, ordinal=free, owner=owner))
            return free

    @patient
    def claim(self, ordinal: int, owner: str, trial: int, setting_key: str, *, wait: bool = False) -> int | None:
        """Let a trial hold a place, with what it measures, unless another trial is at the same setting.

        Args:
            ordinal: the place.
            owner: who took it.
            trial: Optuna's number.
            setting_key: what it is to measure.
            wait: let the trial hold the place in any case; it will wait for the other.

        Returns:
            The trial that is at the same setting, or None: then this one may be measured.

        Raises:
            LostClaimError: the place is not `owner`'s any more.
        """
        at_it = select(Slot.trial).where(
            Slot.study == self.study,
            Slot.setting_key == setting_key,
            Slot.finished.is_(False),
            Slot.ordinal != ordinal,
        )
        with self._alone() as session, session.begin():
            take_turn(session, f"{self.study} {setting_key}")
            place = session.get(Slot, (self.study, ordinal), with_for_update=True)
            if place is None or place.owner != owner:
                raise LostClaimError(trial)
            other = session.scalars(at_it).first()
            if other is None or wait:  # else the place is still that of one who asks: see `recovery.recover`
                place.trial = trial
                place.setting_key = setting_key if other is None else None
            return other

    @patient
    def claim_reference(self, owner: str) -> str:
        """Who has the reference setting in hand: `owner`, unless another has taken it and not given it back."""
        with self._session() as session, session.begin():
            place = session.get(Slot, (self.study, REFERENCE))
            if place is None:
                place = Slot(study=self.study, ordinal=REFERENCE, trial=REFERENCE, owner=owner)
                session.add(place)
            return place.owner

    @patient
    def take_over(self, ordinal: int, owner: str, heir: str) -> bool:
        """Make `owner`'s unfinished place `heir`'s; False where another was quicker."""
        mine = Slot.study == self.study, Slot.ordinal == ordinal, Slot.owner == owner, Slot.finished.is_(False)
        with self._alone() as session, session.begin():
            changed = session.execute(update(Slot).where(*mine).values(owner=heir))
            return bool(changed.rowcount)  # type: ignore[attr-defined]

    @patient
    def free_unfinished_slot(self, ordinal: int) -> None:
        """Give a place back, unless its trial finished."""
        with self._alone() as session, session.begin():
            session.execute(
                delete(Slot).where(Slot.study == self.study, Slot.ordinal == ordinal, Slot.finished.is_(False))
            )

    @patient
    def slots(self, trials: Collection[int] = ()) -> list[Slot]:
        """Every place that is taken and not finished, and those of `trials`."""
        query = select(Slot).where(Slot.study == self.study, or_(Slot.finished.is_(False), Slot.trial.in_(trials)))
        with self._reading() as session:
            return list(session.scalars(query))

    @patient
    def finished(self) -> int:
        """How many places are finished."""
        query = select(func.count()).where(Slot.study == self.study, Slot.finished.is_(True), Slot.ordinal > REFERENCE)
        with self._reading() as session:
            return session.scalar(query) or 0

    # Searchers ------------------------------------------------------------------------------------------

    @patient
    def searcher_started(self, owner: str, name: str) -> None:
        """A searcher begins; an earlier one of that name has ended, whether or not it said so."""
        with self._alone() as session, session.begin():
            session.execute(delete(Searcher).where(or_(Searcher.owner == owner, Searcher.name == name)))
            now = func.now()
            session.add(Searcher(owner=owner, study=self.study, name=name, renewed_at=now, started_at=now))

    def renew(self, owner: str) -> None:
        """A searcher is at work still. The database's clock counts, as hosts' clocks differ."""
        with self._alone() as session, session.begin():
            session.execute(update(Searcher).where(Searcher.owner == owner).values(renewed_at=func.now()))

    def searchers_ended(self, names: Collection[str]) -> None:
        """The searchers of these names work no more."""
        with self._alone() as session, session.begin():
            session.execute(delete(Searcher).where(Searcher.name.in_(names)))

    @patient
    def leases(self) -> dict[str, float]:
        """Seconds since each searcher of the study renewed its lease, by owner."""
        query = select(Searcher.owner, Searcher.renewed_at, func.now()).where(Searcher.study == self.study)
        with self._reading() as session:
            return {owner: (now - renewed).total_seconds() for owner, renewed, now in session.execute(query)}
