"""What becomes of each causal language model class of `transformers`: served, since when; refused, and why.

A class that is not listed, of a later release, must be served with the library's own tokens, or refused for one of
these reasons.
"""

# By reason of `nanovllm.features.unsupported`.
_REFUSED = {
    "both directions": """
        BigBirdPegasusForCausalLM
    """,
    "logits of other rows": """
        WhisperForCausalLM
    """,
    "own attention": """
        BigBirdForCausalLM BloomForCausalLM CpmAntForCausalLM FalconForCausalLM GPTNeoForCausalLM
        GPTNeoXJapaneseForCausalLM GitForCausalLM MegatronBertForCausalLM MllamaForCausalLM MptForCausalLM
        MusicgenForCausalLM MusicgenMelodyForCausalLM MvpForCausalLM OpenAIGPTLMHeadModel ProphetNetForCausalLM
        ReformerModelWithLMHead RemBertForCausalLM RoFormerForCausalLM RwkvForCausalLM TrOCRForCausalLM XGLMForCausalLM
        XLMWithLMHeadModel XLNetLMHeadModel XmodForCausalLM xLSTMForCausalLM
    """,
    "own mask": """
        BltForCausalLM DogeForCausalLM Gemma4UnifiedForConditionalGeneration
    """,
    "positions by row": """
        BartForCausalLM BlenderbotForCausalLM BlenderbotSmallForCausalLM MBartForCausalLM MarianForCausalLM
        PLBartForCausalLM PegasusForCausalLM
    """,
    "positions from padding": """
        CamembertForCausalLM Data2VecTextForCausalLM RobertaForCausalLM RobertaPreLayerNormForCausalLM
        XLMRobertaForCausalLM XLMRobertaXLForCausalLM
    """,
    "recurrent state": """
        MiniMaxForCausalLM RecurrentGemmaForCausalLM
    """,
    "repeated layers": """
        DiffLlamaForCausalLM DoryForCausalLM HrmTextForCausalLM
    """,
    "sparse attention": """
        AXK2ForCausalLM DeepseekV32ForCausalLM DeepseekV4ForCausalLM Dots3NoteForCausalLM GlmMoeDsaForCausalLM
        HYV4ForCausalLM MiniMaxM3VLForCausalLM Qwen4ExpForCausalLM
    """,
    "unknown argument": """
        Inkling2ForCausalLM Inkling2LoopForCausalLM InklingForCausalLM
    """,
    "window of the cache": """
        MoshiForCausalLM
    """,
}
# Served classes with recurrent states, by the tokens that their prefill computes at a time.
RECURRENT = {
    1: """
        FalconMambaForCausalLM JambaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm3ForCausalLM MambaForCausalLM
        ZambaForCausalLM ZayaForCausalLM
    """,
    8: """
        BambaForCausalLM FalconH1ForCausalLM GraniteMoeHybridForCausalLM Mamba2ForCausalLM NemotronHForCausalLM
        Zamba2ForCausalLM
    """,  # the tests' chunk_size
    64: """
        BailingHybridForCausalLM KimiLinearForCausalLM LaraMiniForCausalLM OlmoHybridForCausalLM Qwen3NextForCausalLM
        Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM
    """,
}
CHUNKS = {name: chunk for chunk, names in RECURRENT.items() for name in names.split()}

REFUSED = {name: reason for reason, names in _REFUSED.items() for name in names.split()}

# Served classes that ranks do not share, by reason; those without a plan in `transformers` are most of them.
_ONE_RANK = {
    "no plan": """
        BertGenerationDecoder BertLMHeadModel BioGptForCausalLM BitNetForCausalLM CTRLLMHeadModel DbrxForCausalLM
        ElectraForCausalLM Emu3ForCausalLM ErnieForCausalLM FuyuForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM
        GptOssForCausalLM HunYuanDenseV1ForCausalLM JetMoeForCausalLM ModernBertDecoderForCausalLM OPTForCausalLM
        PersimmonForCausalLM RoCBertForCausalLM StableLmForCausalLM
    """,
    "part of the plan": """
        AriaTextForCausalLM BeamForCausalLM DeepseekV2ForCausalLM Glm4MoeLiteForCausalLM GraniteMoeSWAForCausalLM
        GraniteSWAForCausalLM Llama4ForCausalLM LongcatFlashForCausalLM MiMoV2FlashForCausalLM MiniCPM3ForCausalLM
    """,
    "other results on ranks": """
        Gemma3nForCausalLM
    """,
}
ONE_RANK = {name: reason for reason, names in _ONE_RANK.items() for name in names.split()}
ONE_RANK |= dict.fromkeys(CHUNKS, "states on ranks")

# Classes whose tiny model cannot be built by itself.
NOT_BUILT = {
    "Gemma3nForConditionalGeneration": "its vision tower needs the library timm; Gemma3nForCausalLM is its text part",
    "Gemma4AssistantForCausalLM": "all of its layers read another model's keys and values",
    "Gemma4UnifiedAssistantForCausalLM": "all of its layers read another model's keys and values",
}

_SINCE_0_1 = """
    BertGenerationDecoder BertLMHeadModel ElectraForCausalLM ErnieForCausalLM RoCBertForCausalLM
    ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM BioGptForCausalLM BitNetForCausalLM CTRLLMHeadModel
    CohereCompassForCausalLM CohereForCausalLM DbrxForCausalLM Dots1ForCausalLM Emu3ForCausalLM Ernie4_5ForCausalLM
    Ernie4_5_MoeForCausalLM FlexOlmoForCausalLM FuyuForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM
    GPTNeoXForCausalLM GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM GlmForCausalLM
    GotOcr2ForConditionalGeneration GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM
    HYV3ForCausalLM HeliumForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM
    Jais2ForCausalLM JetMoeForCausalLM LagunaForCausalLM LlamaForCausalLM MellumForCausalLM MiniMaxM2ForCausalLM
    Ministral3ForCausalLM MixtralForCausalLM MossTranscribeDiarizeForConditionalGeneration NanoChatForCausalLM
    OPTForCausalLM Olmo2ForCausalLM OlmoForCausalLM OlmoeForCausalLM PersimmonForCausalLM Phi3ForCausalLM
    Phi4MultimodalForCausalLM PhiForCausalLM PhimoeForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM
    Qwen3MoeForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM SolarOpenForCausalLM Starcoder2ForCausalLM
"""
_SINCE_0_2 = """
AXK1ForCausalLM AfmoeForCausalLM Apertus1p5TextForCausalLM BeamForCausalLM CodeGenForCausalLM Cohere2ForCausalLM
Cohere2MoeForCausalLM CwmForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM Exaone4ForCausalLM
ExaoneMoeForCausalLM FlintForCausalLM GPTJForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma4ForCausalLM Gemma4ForConditionalGeneration
Gemma4UnifiedForCausalLM Glm4MoeLiteForCausalLM GptOssForCausalLM GraniteMoeSWAForCausalLM GraniteSWAForCausalLM
Kolibri1ForCausalLM Llama4ForCausalLM LongcatFlashForCausalLM MiMoV2FlashForCausalLM MiniCPM3ForCausalLM
MinistralForCausalLM MistralForCausalLM ModernBertDecoderForCausalLM NemotronForCausalLM Olmo3ForCausalLM
StableLmForCausalLM VaultGemmaForCausalLM YoutuForCausalLM
"""
_SINCE_0_3 = """
BailingHybridForCausalLM BambaForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GraniteMoeHybridForCausalLM
JambaForCausalLM KimiLinearForCausalLM LaraMiniForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm3ForCausalLM
Mamba2ForCausalLM MambaForCausalLM NemotronHForCausalLM OlmoHybridForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM
Qwen3_5MoeForCausalLM Zamba2ForCausalLM ZambaForCausalLM ZayaForCausalLM
"""
# Others are unreleased.
_RELEASES = {"0.1.0": _SINCE_0_1, "0.2.0": _SINCE_0_2, "0.3.0": _SINCE_0_3}
SINCE = {name: release for release, names in _RELEASES.items() for name in names.split()}
