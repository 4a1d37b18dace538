"""Text in and out of the policy: tokenizers, chat templates, stop strings, tool-call parsing."""
