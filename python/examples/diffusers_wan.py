"""vcattn in a diffusers model: a policy, a request with its steps, and the report of what became of the calls.

A tiny WanTransformer3DModel with random weights and a bare denoising loop stand in for a pipeline, so that this runs
anywhere in seconds. With a real one it is

    pipe = WanPipeline.from_pretrained("Wan-AI/Wan2.2-T2V-A14B-Diffusers", torch_dtype=torch.bfloat16).to("cuda")
    with attach(pipe, policy=policy) as report:
        pipe(prompt)
"""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

import vcattn
from vcattn.integrations.diffusers import attach


class TinyPipeline:
    """What `attach` looks for in a pipeline: denoisers and a scheduler."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.transformer = WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=64,
            in_channels=4,
            out_channels=4,
            text_dim=32,
            freq_dim=32,
            ffn_dim=128,
            num_layers=2,
            rope_max_seq_len=64,
        ).eval()

    @torch.no_grad()
    def __call__(self, steps: int) -> torch.Tensor:
        torch.manual_seed(1)
        self.scheduler.set_timesteps(steps)
        latents, text = torch.randn(1, 4, 5, 32, 32), torch.randn(2, 1, 8, 32)
        for t in self.scheduler.timesteps:
            cond, uncond = (self.transformer(latents, t[None], part, return_dict=False)[0] for part in text)
            latents = self.scheduler.step(uncond + 4 * (cond - uncond), t, latents, return_dict=False)[0]
        return latents


def main() -> None:
    pipe = TinyPipeline()
    expected = pipe(steps=8)
    # 1,280 tokens here, so the length below which calls stay native is set lower than its default of 4,096.
    policy = vcattn.Policy("accurate", {"*.attn2": "native"}, native_first=1, native_last=1, min_seqlen=1024)
    with attach(pipe, policy=policy) as report:
        latents = pipe(steps=8)
    error = (latents - expected).norm() / expected.norm()
    print(f"relative difference of the final latents: {error:.4f}")
    print(report)


if __name__ == "__main__":
    main()
