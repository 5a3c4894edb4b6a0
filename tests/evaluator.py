"""The challenge's evaluator as a stranger would write it: what an organiser runs on an exported folder.

    python -m tests.evaluator FOLDER --prompts FILE --records FILE --out DIR [--output-len 512]

It knows the folder's manifest and the OpenAI protocol, and nothing of this project. In the order of the public runs:
start `serve` and wait for GET /v1/models; four warm-ups; the prompts one at a time, with a forced number of tokens; the
same prompts again for their token ids; the records through prompt_logprobs. Writes summary.json with the public runs'
fields beside decode_outputs.jsonl and ppl_results.jsonl.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

WARMUPS = 4


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def first_turns(path):
    """(endpoint, body) of each prompt: a chat for ShareGPT conversations, token ids for lines of them."""
    if path.suffix == ".json":
        for row in json.loads(path.read_text()):
            said = next(turn["value"] for turn in row["conversations"] if turn["from"] == "human")
            yield "/v1/chat/completions", {"messages": [{"role": "user", "content": said}]}
    else:
        for row in lines(path):
            yield "/v1/completions", {"prompt": row["prompt_token_ids"], "add_special_tokens": False}


class Evaluation:
    def __init__(self, http, model, output_len):
        self.http, self.model, self.output_len = http, model, output_len

    def ask(self, path, body):
        answer = self.http.post(path, json={"model": self.model, "temperature": 0.0, **body})
        answer.raise_for_status()
        return answer.json()

    def time(self, prompts):
        """Wall seconds of each prompt, decoded to exactly the forced length."""
        latencies, read = [], 0
        for path, body in prompts:
            started = time.perf_counter()
            answer = self.ask(path, {**body, "max_tokens": self.output_len, "ignore_eos": True})
            latencies.append(time.perf_counter() - started)
            if answer["usage"]["completion_tokens"] != self.output_len:
                raise SystemExit(f"{answer['usage']['completion_tokens']} tokens came back, not {self.output_len}")
            read += answer["usage"]["prompt_tokens"]
        return latencies, read

    def decode(self, prompts):
        """Token ids of each prompt's output, which the endpoint must give."""
        outputs = []
        for path, body in prompts:
            asked = {"max_tokens": self.output_len, "ignore_eos": True, "return_token_ids": True}
            (choice,) = self.ask(path, {**body, **asked})["choices"]
            if len(choice["token_ids"]) != self.output_len:
                raise SystemExit("choices[0].token_ids is not there or has another length")
            outputs.append(choice["token_ids"])
        return outputs

    def score(self, records):
        """Negative log-likelihood and number of target tokens of each record."""
        for record in records:
            context, target = record["context_token_ids"], record["target_token_ids"]
            asked = {"max_tokens": 1, "prompt_logprobs": 1, "add_special_tokens": False}
            (choice,) = self.ask("/v1/completions", {"prompt": [*context, *target], **asked})["choices"]
            found = choice["prompt_logprobs"][len(context) :]
            yield -math.fsum(f[str(t)]["logprob"] for f, t in zip(found, target, strict=True)), len(target)


def evaluate(folder, prompts_file, records_file, out, output_len):
    """The summary."""
    manifest = json.loads((folder / "manifest.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    base = f"http://127.0.0.1:{manifest['port']}"
    command = shlex.split(manifest["serve"])
    command[0] = sys.executable  # "python", of the environment that the dependencies are installed in
    with (out / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        with httpx.Client(base_url=base, timeout=600, trust_env=False) as http:
            model = wait_for_models(http, server)
            stage, prompts = Evaluation(http, model, output_len), list(first_turns(prompts_file))
            for path, body in prompts[:WARMUPS]:
                stage.ask(path, {**body, "max_tokens": 16})
            latencies, read = stage.time(prompts)
            outputs = stage.decode(prompts)
            scores = list(stage.score(lines(records_file)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)
    (out / "decode_outputs.jsonl").write_text("".join(json.dumps({"token_ids": o}) + "\n" for o in outputs))
    (out / "ppl_results.jsonl").write_text("".join(json.dumps({"nll": n, "tokens": t}) + "\n" for n, t in scores))
    duration_s, generated = math.fsum(latencies), output_len * len(latencies)
    tokens = sum(count for _, count in scores)
    summary = {
        "base_url": base,
        "completed": len(latencies),
        "decode_num_completion_tokens": sum(map(len, outputs)),
        "decode_num_records": len(outputs),
        "decode_token_ids_required": True,
        "duration_s": duration_s,
        "max_concurrency": 1,
        "mean_e2e_latency_ms": 1e3 * statistics.fmean(latencies),
        "model": model,
        "num_prompts": len(prompts),
        "output_len": output_len,
        "output_tps": generated / duration_s,
        "p99_e2e_latency_ms": 1e3 * sorted(latencies)[math.ceil(0.99 * len(latencies)) - 1],
        "ppl": math.exp(math.fsum(nll for nll, _ in scores) / tokens),
        "ppl_num_tokens": tokens,
        "request_throughput_req_s": len(latencies) / duration_s,
        "total_tps": (generated + read) / duration_s,
        "tps": generated / duration_s,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def wait_for_models(http, server, patience_s=1800):
    """The served model's name, once GET /v1/models answers with it."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and server.poll() is None:
        try:
            answer = http.get("/v1/models")
            if answer.status_code == 200:
                return answer.json()["data"][0]["id"]
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SystemExit("the endpoint never answered GET /v1/models")


def main():
    p = argparse.ArgumentParser(description="Evaluate an exported folder as the challenge did.")
    p.add_argument("folder", type=Path)
    p.add_argument("--prompts", type=Path, required=True)
    p.add_argument("--records", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--output-len", type=int, default=512)
    args = p.parse_args()
    print(json.dumps(evaluate(args.folder, args.prompts, args.records, args.out, args.output_len), indent=2))


if __name__ == "__main__":
    main()
