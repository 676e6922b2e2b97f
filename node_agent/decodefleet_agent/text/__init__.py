"""From text to tokens and back: tokenizer, chat template, and the text of a stream."""
