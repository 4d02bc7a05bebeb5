"""From a request to a job: what is asked is compared with what there is, and with what the server is set to give."""

from __future__ import annotations

import secrets
from collections.abc import Collection

import attrs
import trio

from uma_trio.config import Config
from uma_trio.engine.records import ModelFacts
from uma_trio.models.prompt import Prompt
from uma_trio.protocol.messages import Generate, Slo
from uma_trio.runner.admission import check_token_ids, fitted, tokens_to_generate
from uma_trio.runner.job import Job, Sink
from uma_trio.runner.wishes import answers, logit_edits, sampling_params
from uma_trio.sampling import TokenHistory
from uma_trio.scheduling.policy import Priority, Slot


@attrs.frozen
class Intake:
    """Makes the jobs of one runner."""

    facts: ModelFacts
    config: Config

    def jobs(self, request: Generate, prompt: Prompt, sink: Sink, *, tenant: int, durable: bool) -> list[Job]:
        """Of a request that has just arrived: one for each answer.

        Raises:
            UmaError: it cannot be served; see ``admission``.
        """
        seed = request.seed if request.seed is not None else secrets.randbits(63)
        return [
            self._job(wanted, index, prompt, sink, tenant, durable=durable) for wanted, index in answers(request, seed)
        ]

    def _job(
        self, request: Generate, index: int | None, prompt: Prompt, sink: Sink, tenant: int, *, durable: bool
    ) -> Job:
        """One answer's.

        Args:
            index: of the answer, where there are several.
        """
        facts, limits = self.facts, self.config.limits
        prompt = fitted(prompt, request, facts, limits)
        max_tokens = tokens_to_generate(request, len(prompt.tokens), facts, limits)
        check_token_ids(request, facts)
        params = sampling_params(request)
        banned, bias = logit_edits(request, facts)
        return Job(
            request=request,
            prompt=prompt,
            max_tokens=max_tokens,
            params=params,
            mask=banned,
            bias=bias,
            transcript=TokenHistory(prompt.tokens, params, max_tokens) if params.has_penalties else None,
            ending=_ending(facts.eog_ids, request.stop_token_ids),
            sink=sink,
            arrived_at=trio.current_time(),
            slot=self._slot(request.slo, len(prompt.tokens), tenant),
            durable=durable,
            index=index,
            target_tbt_s=self._target_tbt_ms(request.slo) / 1e3,
        )

    def _slot(self, slo: Slo, pending: int, tenant: int) -> Slot:
        ttft_ms = self.config.scheduling.target_ttft_ms if slo.target_ttft_ms is None else slo.target_ttft_ms
        due_s = trio.current_time() + ttft_ms / 1e3
        return Slot(-1, pending, due_s=due_s, priority=Priority[slo.priority.upper()], tenant=tenant)

    def _target_tbt_ms(self, slo: Slo) -> float:
        if slo.target_tbt_ms is not None:
            return slo.target_tbt_ms
        scheduling = self.config.scheduling
        return scheduling.background_tbt_ms if slo.priority == "background" else scheduling.target_tbt_ms


def _ending(eog: Collection[int], stops: Collection[int]) -> frozenset[int]:
    return frozenset((*eog, *stops))
