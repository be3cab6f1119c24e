"""A server and a client of OpenAI: `python examples/server_client.py [URL]`.

Without a URL it starts `forerun serve shipped` itself and ends it. It needs `pip install '.[serve]' openai`.
"""

import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import urlopen

try:
    from openai import OpenAI
except ImportError:
    sys.exit("this example needs the client of OpenAI: pip install openai")

PORT = 8027


def start() -> subprocess.Popen[bytes]:
    """Start a server and return it when it is ready."""
    server = subprocess.Popen([sys.executable, "-m", "forerun", "serve", "shipped", "--port", str(PORT)])
    while True:
        try:
            urlopen(f"http://127.0.0.1:{PORT}/ready")
            return server
        except URLError:
            if server.poll() is not None:
                raise SystemExit("the server has said why it does not run") from None
            time.sleep(0.1)


def ask(url: str) -> None:
    """Ask for an answer with a report of its speculation, and for a stream."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "def add("}],
        max_tokens=16,
        temperature=0,
        extra_body={"speculation": {"spec_length": 4, "report": True}},
    )
    report = answer.model_extra["forerun"]
    print(repr(answer.choices[0].message.content))
    print(report["num_accepted"], "of", report["num_drafted"], "guesses were accepted")
    for chunk in client.completions.create(model=model, prompt="class Stack:", max_tokens=16, stream=True):
        print(chunk.choices[0].text, end="", flush=True)
    print()


def main() -> None:
    if len(sys.argv) > 1:
        ask(sys.argv[1])
        return
    server = start()
    try:
        ask(f"http://127.0.0.1:{PORT}")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
