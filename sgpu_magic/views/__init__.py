"""What a person sees of a run: one `RunView` folded from its events, drawn as text, HTML and errors."""
