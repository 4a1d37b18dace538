"""What each number of summary.json means."""

MEANINGS = {
    "speculation": "arm of the run: off, frozen or cotrained",
    "steps": "policy updates made",
    "draft_length": "K, tokens drafted per verify round",
    "policy_parameters": "numbers in the policy that training moves",
    "draft_parameters": "numbers in the draft that training moves",
    "pass_rate_start": "before training, one sample per held-out prompt, drawn as the rollouts are",
    "pass_rate_end": "after training, on the same prompts",
    "eval_prompts": "held-out prompts in an evaluation",
    "accepted_length_start": "committed tokens per verify round, pooled, before training",
    "accepted_length_end": "the same after training",
    "accepted_length_untrained": "the same for a draft of random weights, under the trained policy",
    "accepted_length_frozen_end": "the same for the draft as it was before training, under the trained policy",
    "generator_trainer_kl_max": "largest k3 estimate of a step, nats",
    "generator_trainer_logprob_diff_max": "largest difference of one token's two log-probabilities, nats",
    "tokens_per_second_plain": "median, plain decoding, after compilation",
    "tokens_per_second_speculative": "median, speculative decoding, timed in turns with plain",
    "rollout_speedup": "speculative / plain tokens per second of whole generate calls, median over turns; "
    "on prompts and keys that had no part in choosing the drafted length",
    "rollout_speedup_draft_length": "drafted tokens per round in that comparison, the fastest of the table",
    "end_to_end_speedup": "speed of a whole training step against one with plain rollouts",
    "draft_update_overhead": "what training the draft adds to an update, as a fraction",
    "frozen_twin_overhead": "what scoring the frozen twin adds to an update, as a fraction; only this report needs it",
    "training_batch_rollout_speedup": "speculative / plain speed of generating one training batch",
    "wall_seconds": "wall-clock seconds of the process that ended the run",
}
