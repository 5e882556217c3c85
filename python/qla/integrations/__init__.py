"""Switches that let other libraries' layers call `qla`: `transformers` (Qwen3-Next, Qwen3.5) and `fla` (flash-linear-attention); and
`flashinfer`, FlashInfer's call computed here."""
