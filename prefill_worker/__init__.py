"""The prefill worker: reads prompts in the target's place and hands over what the target would remember of them."""
