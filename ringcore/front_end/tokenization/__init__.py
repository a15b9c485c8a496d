"""Chat templates and tokenizers, executed in processes that can be killed."""
