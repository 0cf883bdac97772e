"""Write the responses of a model behind an OpenAI-compatible endpoint (vLLM, say), as ``pacmr predict`` does.

    python examples/endpoint_responses.py --source AnthropicHH --source.single_turn true \\
      --output runs/other.jsonl --endpoint.model NAME --endpoint.base_url http://localhost:8000/v1 \\
      --endpoint.max_tokens 256
    pacmr judge runs/mine/generations.jsonl runs/other.jsonl --judge EndpointJudge --judge.task hh
"""

from __future__ import annotations

from collections import Counter

from jsonargparse import lazy_instance

from pacmr_lightning.command_line.output import print_result
from pacmr_lightning.command_line.parser import run_script
from pacmr_lightning.datamodules.evaluation_prompts import draw_prompts
from pacmr_lightning.datamodules.sources import Source
from pacmr_lightning.errors import UserError, check_within
from pacmr_lightning.evaluation.answer_store import AnswerStore
from pacmr_lightning.evaluation.conversation import as_messages
from pacmr_lightning.evaluation.endpoint import Endpoint
from pacmr_lightning.evaluation.prompt_batch import Response
from pacmr_lightning.evaluation.response_files import answers_path, output_path
from pacmr_lightning.files import write_json_lines

_ENDPOINT = lazy_instance(Endpoint, max_tokens=128)


def endpoint_responses(
    source: Source, output: str, endpoint: Endpoint = _ENDPOINT, n: int | None = 800, seed: int = 42
) -> None:
    """Writes responses of a model behind an OpenAI-compatible endpoint, in the format of pacmr predict.

    The same n and seed give the same prompts and ids as predict_prompts and predict_seed of pacmr predict, so
    that pacmr judge can compare the two. Chat messages are sent as they are, Human/Assistant transcripts by
    turn, other texts as one user turn. Reasoning, such as text between <think> and </think>, is removed.
    Answers are stored in OUTPUT.answers.sqlite: the same command resumes an interrupted run.

    Args:
        source: source of the prompts.
        output: file to write, ending in .jsonl.
        endpoint: the model; max_tokens defaults to 128 (Qu et al.: 128 for TL;DR, 256 for Anthropic HH).
        n: number of prompts, sampled from the source; null, or more than there are, for all.
        seed: seed of the sample.
    """
    check_within("[1, inf)", ", or null for all prompts", n=n)
    path = output_path(output)
    source.refuse_own("output", path)
    prompts = draw_prompts(source, n, seed)
    conversations = [as_messages(prompt.asked) for prompt in prompts]
    with AnswerStore(answers_path(path)) as store:
        answers = endpoint.ask(conversations, store, f"Asking {endpoint.model}")
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.text:
            # Tokens that are billed hold reasoning and answers that were thrown away.
            response = Response(answer.text, "length" if answer.cut else "stop", None, None)
            rows.append(response.row(prompt.id, prompt.asked) | prompt.columns)
    problems = Counter(answer.problem for answer in answers if not answer.text)
    failed = f"{problems.total()} requests failed"
    if problems:
        failed += f" (mostly: {problems.most_common(1)[0][0]})"
    if not rows:
        raise UserError(f"{failed}, so there is nothing to write; check the server and its model.")
    write_json_lines(path, rows)
    cut = sum(row["finish_reason"] == "length" for row in rows)
    if unsent := sorted({column for prompt in prompts for column in prompt.columns}):
        print(f"Not sent to the endpoint: the columns {' and '.join(unsent)}; they are in the file.")
    if problems:
        print(f"{failed}; their prompts are not in the file, and the same command repeats them.")
    print_result(f"{path}: {len(rows)} responses of {endpoint.model}, {cut} of them truncated.")


if __name__ == "__main__":
    run_script(endpoint_responses)
