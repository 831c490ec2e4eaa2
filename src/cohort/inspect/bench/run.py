"""The benchmarks of `cohort bench`, on a model from files or one of random weights."""

from __future__ import annotations

from cohort.config.options import BenchOptions, BenchResult, EngineBenchOptions, LearnerBenchOptions
from cohort.errors import ModelError
from cohort.inspect.bench import measure
from cohort.jobs.build import use_threads
from cohort.models.catalog import resolve
from cohort.models.config import check_context
from cohort.models.decoder import Decoder
from cohort.models.device import DTYPES, find_device, find_dtype
from cohort.models.files import load_folder
from cohort.models.shapes import named_shape, random_decoder


def bench_engine(options: EngineBenchOptions) -> BenchResult:
    return measure.bench_engine(_bench_model(options), options)


def bench_learner(options: LearnerBenchOptions) -> BenchResult:
    return measure.bench_learner(_bench_model(options), options)


def bench_step(options: BenchOptions) -> BenchResult:
    return measure.bench_step(_bench_model(options), options)


def _bench_model(options: BenchOptions) -> Decoder:
    """The model to be measured, on its device; refuses what cannot be measured before anything is loaded."""
    device = find_device(options.device)
    use_threads(options.threads, device)
    dtype = DTYPES[find_dtype(options.dtype, device)]
    if options.weights == "random":
        config = named_shape(options.model)
        check_context(config, options.prompt_tokens + options.completion_tokens)
        return random_decoder(config, dtype, str(device))
    decoder = load_folder(resolve(options.model), dtype).decoder
    if not isinstance(decoder, Decoder):
        raise ModelError(f"{options.model} is no native model: the limits it could be measured against are not known")
    return decoder.to(device)
