"""The served model's text side: names, chat template, thinking tags and tool call formats."""
