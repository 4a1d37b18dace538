"""Generation: propose, verify, commit; lossless at any temperature."""
