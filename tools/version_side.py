"""A cluster of whichever checkout is on the path, for `versions.py`: run as a file, with that checkout's own client.

Reads one JSON object a line from stdin, {tokens, max_tokens, temp, seed, mode}, and answers {tokens, decode_ms}. Uses
only what every version of Outrider offers.
"""

from __future__ import annotations

import json
import sys

from outrider import LocalCluster, SamplingParams


def main() -> None:
    with LocalCluster() as cluster:
        client = cluster.client()
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            tokens, mode = asked.pop("tokens"), asked.pop("mode")
            result = client.generate(tokens, SamplingParams(ignore_eos=True, **asked), mode=mode)
            answer = {"tokens": list(result.token_ids), "decode_ms": result.timings.predicted_ms}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
