"""What the text side raises."""


class TextError(ValueError):
    """A tokenizer or chat template cannot be used; the message says what to change."""
