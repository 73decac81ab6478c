"""Raw mlx-lm, in a separate process: `python -m benchmarks.harness.raw MODEL_DIRECTORY`.

Writes its number of threads, then reads one workload per line and answers each with one line: its
speed. One row runs through `stream_generate`, several through `BatchGenerator`.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import mlx.core as mx
from mlx_lm import load, stream_generate
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from benchmarks.harness.threads import set_best_threads
from benchmarks.harness.workload import Sampling, Speed, Timeline, Workload, speed

PROMPT = tuple(range(8))


class RawModel:
    """A model as mlx-lm loads it; it ignores end tokens.

    Attributes:
        threads: For matrix products.
    """

    def __init__(self, directory: str) -> None:
        self._model, self._tokenizer = load(directory)[:2]
        self._tokenizer.eos_token_ids = set()
        cache = make_prompt_cache(self._model)
        mx.eval(self._model(mx.array([PROMPT]), cache=cache))
        # mlx-lm's users set the number that is best for them.
        token = mx.array([PROMPT[:1]])
        self.threads = set_best_threads(lambda: mx.eval(self._model(token, cache=cache)))

    def generate(self, workload: Workload) -> Speed:
        """Generate a workload, and return its speed."""
        started = time.perf_counter()
        rows = self._one(workload) if len(workload.prompts) == 1 else self._batch(workload)
        return speed(started, rows)

    def _one(self, workload: Workload) -> list[Timeline]:
        row = Timeline()
        replies = stream_generate(
            self._model,
            self._tokenizer,
            workload.prompts[0],
            max_tokens=workload.new_tokens,
            sampler=_sampler(workload.samplings[0]),
        )
        for reply in replies:
            row.mark(time.perf_counter(), reply.generation_tokens)
        return [row]

    def _batch(self, workload: Workload) -> list[Timeline]:
        count = len(workload.prompts)
        # Equal rows share one sampler: the generator then draws for all of them at once.
        samplers = {sampling: _sampler(sampling) for sampling in workload.samplings}
        generator = BatchGenerator(
            self._model, completion_batch_size=count, prefill_batch_size=count
        )
        uids = generator.insert(
            [self._tokenizer.encode(prompt) for prompt in workload.prompts],
            max_tokens=[workload.new_tokens] * count,
            samplers=[samplers[sampling] for sampling in workload.samplings],
        )
        rows = {uid: Timeline() for uid in uids}
        while responses := generator.next_generated():
            now = time.perf_counter()
            for response in responses:
                row = rows[response.uid]
                row.mark(now, len(row.times) + 1)
        generator.close()
        return list(rows.values())


def main() -> None:
    """Answer workloads until standard input ends."""
    raw = RawModel(sys.argv[1])
    _say(raw.threads)
    for line in sys.stdin:
        _say(asdict(raw.generate(Workload.from_json(line))))
        mx.clear_cache()


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _sampler(sampling: Sampling) -> Callable[[mx.array], mx.array]:
    sampler: Callable[[mx.array], mx.array] = make_sampler(
        temp=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
    return sampler


if __name__ == "__main__":
    main()
