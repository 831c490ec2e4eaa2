"""Models as users name them: a name of the catalogue or of the hub, a folder, or a checkpoint of a run (RUN@STEP).

Torch is not imported.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from cohort.errors import CohortError, ModelError
from cohort.models import hub
from cohort.models.catalog import PULLABLE, find_named, has_origin, list_models, make_path_absolute, resolve_model
from cohort.run.finding import find_similar_run, list_runs, require_run
from cohort.run.naming import NamedCheckpoint, find_checkpoint
from cohort.system.paths import expand_home


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedModel:
    """A model that is on this machine, found by its name."""

    name: str  # with the step that "last" or "best" stand for
    lasting_name: str  # the same, but paths are absolute: it means the same model in another working directory
    folder: Path
    checkpoint: NamedCheckpoint | None = None  # None = the model is not named as part of a run


def find_model(name: str) -> NamedModel:
    """Returns the model that `name` means.

    `name` is a bundled or pulled name, owner/name of the hub, the path of a folder or of a converted GGUF file, RUN
    (its newest checkpoint), RUN@STEP or RUN@best, where RUN may be a part of a run's name. Names of the catalogue come
    first; a path that begins with ./ is never one. Fetches nothing. Raises ModelError or RunError, which say what to
    do, if there is no such model.
    """
    # A model that could be pulled under this name is meant before a run whose name it is a part of.
    found = None if find_named(name) or name in PULLABLE else find_checkpoint(name)
    if found is None:
        try:
            return NamedModel(name=name, lasting_name=make_path_absolute(name), folder=resolve_model(name))
        except ModelError as error:
            _suggest_run(name, error)
            raise
    lasting = NamedCheckpoint(run=found.run.absolute(), step=found.step)
    return NamedModel(name=found.name, lasting_name=lasting.name, folder=found.folder / "model", checkpoint=found)


def _suggest_run(name: str, error: ModelError) -> None:
    """Raises an error that suggests a run in place of the model `name`, which was not found, if one has a similar name.

    `error` says that it was not found. Raises RunError if `name` is in a folder of runs, such as a sweep.
    """
    path = expand_home(name)
    if path.exists() or name in PULLABLE:
        return
    if path.name != str(path) and (list_runs(path.parent) or list_runs(Path("runs") / path.parent)):
        require_run(path)
    similar = find_similar_run(path)
    if not similar:
        return
    if has_origin(name) or difflib.get_close_matches(name, [entry.name for entry in list_models()]):
        raise ModelError(f"{str(error).removesuffix('.')}. Did you mean the run {similar}?") from error
    raise ModelError(
        f'there is no folder, model or run "{name}". Did you mean the run {similar}? `cohort runs` lists all runs, and '
        "`cohort models` all models."
    ) from error


def name_for_other_programs(name: str) -> str:
    """Returns a name of the model under which transformers, PEFT and vLLM find it: owner/name, or an absolute folder.

    `name` is as in `find_model`. A model that is no longer on this machine keeps its name.
    """
    try:
        folder = find_model(name).folder
    except CohortError:
        return name
    is_from_hub = hub.is_hub_name(name) and not Path(name).is_dir()
    return name if is_from_hub else str(folder.absolute())
