"""Runs a cluster and client of the checkout on the path, for `versions.py`, which starts it as a file.

Reads a JSON object per line from stdin, {tokens, max_tokens, temp, seed, mode}, and answers {tokens, decode_ms}. Uses
only names that every version of Outrider has.
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
            request = json.loads(line)
            tokens, mode = request.pop("tokens"), request.pop("mode")
            result = client.generate(tokens, SamplingParams(ignore_eos=True, **request), mode=mode)
            answer = {"tokens": list(result.token_ids), "decode_ms": result.timings.predicted_ms}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
