"""A made-up server in place of an exported folder's serve.py: it answers as the manifest's FAKE key says."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

manifest = json.loads((Path(__file__).parent / "manifest.json").read_text())
fake = json.loads(manifest["env"]["FAKE"])
drafting = "SPECULATIVE_CONFIG" in manifest["env"]
counts = {"drafts": 0}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # header and body in one packet: none waits for the other to be acknowledged

    def log_message(self, *_): ...

    def answer(self, body, status=200):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        drafts = counts["drafts"]
        answers = {
            "/v1/models": {"data": [{"id": manifest["served_model_name"]}]},
            "/effective": fake["effective"],
            "/metrics": f"vllm:spec_decode_num_drafts_total{{}} {drafts}\n"
            f"vllm:spec_decode_num_draft_tokens_total{{}} {drafts * fake['drafts']}\n"
            f"vllm:prefix_cache_hits_total{{}} {fake.get('cached', 0)}\n",
        }
        if self.path in fake.get("refuses", ()):
            self.answer({"error": fake["refuses"][self.path]}, 500)
        else:
            self.answer(answers[self.path])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            text = body.get("prompt") or f"<user>{body['messages'][-1]['content']}"
            self.answer({"tokens": [*map(ord, text)]})
            return
        if isinstance(body.get("prompt"), str):  # a task: the last word of it, unless some are answered wrongly
            word, wrong = body["prompt"].split()[-1], fake.get("wrong_answers", ())
            self.answer({"choices": [{"text": f" {'no' if word in wrong else word}\n"}]})
            return
        prompt, count = body.get("prompt") or [*map(ord, body["messages"][0]["content"])], body["max_tokens"]
        time.sleep(fake["first_token_s"] + (fake["decode_s"] if count > 1 else 0))
        if drafting and count > 1:
            counts["drafts"] += 5
        tokens = [(sum(prompt) + 7 * i) % 4096 for i in range(count)]
        if drafting and fake.get("wrong_token"):
            tokens[count // 2] = 4095
        choice = {"token_ids": tokens}
        if "logprobs" in body:
            choice["logprobs"] = {
                "token_logprobs": [-1.0] * count,
                "top_logprobs": [{f"token_id:{t}": -1.0, "token_id:0": -3.0} for t in tokens],
            }
        if "prompt_logprobs" in body:
            likely = {str(4000 + i): fake.get("likeliest", -1.5) - i for i in range(body["prompt_logprobs"])}
            shown = [{**likely, str(t): fake["logprob"]} for t in prompt[1:]]
            choice["prompt_logprobs"] = [None, *({t: {"logprob": x} for t, x in entry.items()} for entry in shown)]
        self.answer({"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": count}})


if fake.get("listens") is False:
    print("Warm-up done: 0 prompts.", flush=True)
    time.sleep(60)
if fake.get("dies"):
    sys.exit(f"error: {fake['dies']}")
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
print("Warm-up done: 0 prompts.", flush=True)
server.serve_forever()
