"""Collects what the run card shows, from the run directory and this machine."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cohort.config.schema import RunConfig
from cohort.evaluation.records import Evaluation
from cohort.logs.view import Summary
from cohort.run.card import CardData
from cohort.run.directory import RunDirectory
from cohort.run.machine import describe_machine
from cohort.run.store.reader import Reader
from cohort.run.store.records import RunDescription


def read_card_data(
    directory: RunDirectory,
    config: RunConfig,
    description: RunDescription,
    summary: Summary,
    evaluations: Mapping[int, Evaluation],
    picture: str,
    num_ranks: int,
) -> CardData:
    """Returns what the card of a run shows: from run.db, all evaluations by step, and the lines of `summary`.

    `picture` is the name of the file with the curves of the run; "" = there is none.
    """
    with Reader(directory.database) as reader:
        events = reader.read_events()
        return CardData(
            name=directory.path.name,
            config=config,
            description=description,
            step=summary.step,
            command=next((event.text for event in events if event.kind == "command"), ""),
            threads=torch.get_num_threads(),
            machine=describe_machine(torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""),
            closing=summary.format_lines(),
            evaluations=[evaluations[step] for step in sorted(evaluations)],
            series=reader.read_all_series(),
            events=events,
            fates=reader.count_fates(),
            picture=picture,
            ranks=num_ranks,
        )
