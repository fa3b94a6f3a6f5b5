// Tensor files as the reference writers make them, and what is refused, with which words.
#include "io/tensor_file.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <ostream>
#include <string>
#include <vector>

namespace vcattn::io {
namespace {

using namespace std::string_literals;

std::vector<std::byte> bytes_of(const std::string& text) {
  std::vector<std::byte> bytes;
  for (const char c : text) bytes.push_back(static_cast<std::byte>(c));
  return bytes;
}

template <typename Integer>
std::string little_endian(Integer value, size_t size) {
  std::string text;
  for (size_t i = 0; i < size; ++i) text += static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
  return text;
}

std::string safetensors(const std::string& header, const std::string& data = "") {
  return little_endian(header.size(), 8) + header + data;
}

std::string npy(const std::string& header, const std::string& data = "", char major = 1) {
  return "\x93NUMPY"s + major + '\0' + little_endian(header.size(), major == 1 ? 2 : 4) + header + data;
}

TensorFile parse(const std::string& path, const std::string& content, const std::vector<std::string>& wanted = {}) {
  const std::vector<std::byte> bytes = bytes_of(content);
  return path.ends_with(".npy") ? parse_npy(bytes, path) : parse_safetensors(bytes, path, wanted);
}

// The message of the Error that `call` throws.
template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void expect_tensor(const Tensor& tensor, const std::string& name, vcattn_dtype dtype, const std::vector<int64_t>& shape,
                   const std::string& data) {
  EXPECT_EQ(tensor.name, name);
  EXPECT_STREQ(dtype_name(tensor.dtype), dtype_name(dtype)) << name;
  EXPECT_EQ(tensor.shape, shape) << name;
  EXPECT_EQ(tensor.data, bytes_of(data)) << name;
}

// ---- files of the reference writers -------------------------------------------------------------------------------

// safetensors 0.8.0, save(): FP32 before FP16 before I8, header padded with a space.
const std::string kSafetensorsFile =
    "\x40\x01\0\0\0\0\0\0"s
    R"({"__metadata__":{"b":"ü\"\\","k":"v"},)"
    R"("q":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},)"
    R"("s":{"dtype":"F32","shape":[],"data_offsets":[8,12]},)"
    R"("é\n":{"dtype":"F32","shape":[0,3],"data_offsets":[12,12]},)"
    R"("bias":{"dtype":"F16","shape":[1],"data_offsets":[12,14]},)"
    R"("i":{"dtype":"I8","shape":[3],"data_offsets":[14,17]}} )"
    "\0\0\x80\x3F\0\0\0\x40\0\0\x40\x40\0\x38\x01\x02\x03"s;

TEST(Safetensors, ReadsAFileOfTheReferenceWriter) {
  const TensorFile file = parse("a.safetensors", kSafetensorsFile);
  EXPECT_EQ(file.metadata, (std::map<std::string, std::string>{{"b", "ü\"\\"}, {"k", "v"}}));
  ASSERT_EQ(file.tensors.size(), 4u) << "all but the I8 tensor";
  expect_tensor(file.tensors[0], "q", VCATTN_FP32, {1, 2}, "\0\0\x80\x3F\0\0\0\x40"s);
  expect_tensor(file.tensors[1], "s", VCATTN_FP32, {}, "\0\0\x40\x40"s);
  expect_tensor(file.tensors[2], "é\n", VCATTN_FP32, {0, 3}, "");
  expect_tensor(file.tensors[3], "bias", VCATTN_FP16, {1}, "\0\x38"s);
  EXPECT_EQ(file.tensors[1].element_count(), 1);
  EXPECT_EQ(file.tensors[2].element_count(), 0);
}

TEST(Safetensors, ReadsWhatIsWantedInThatOrder) {
  const TensorFile file = parse("a.safetensors", kSafetensorsFile, {"bias", "q"});
  ASSERT_EQ(file.tensors.size(), 2u);
  EXPECT_EQ(file.tensors[0].name, "bias");
  EXPECT_EQ(file.tensors[1].name, "q");
}

// NumPy 2.4.6, save() and lib.format.write_array(version=...).
TEST(Npy, ReadsFilesOfNumpy) {
  const auto header = [](const std::string& dict) { return dict + std::string(117 - dict.size(), ' ') + "\n"; };
  const std::string fp32 =
      npy(header("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), }"), "\0\0\x80\x3F\0\0\0\x40"s);
  EXPECT_EQ(fp32.substr(0, 10), "\x93NUMPY\x01\0v\0"s);
  expect_tensor(parse("dir/q.npy", fp32).tensors.at(0), "q", VCATTN_FP32, {2, 1}, "\0\0\x80\x3F\0\0\0\x40"s);
  const std::string fp16 = npy(header("{'descr': '<f2', 'fortran_order': False, 'shape': (2,), }"), "\0\x3C\0\xC1"s);
  expect_tensor(parse("h.npy", fp16).tensors.at(0), "h", VCATTN_FP16, {2}, "\0\x3C\0\xC1"s);
  const std::string scalar = npy(header("{'descr': '<f4', 'fortran_order': False, 'shape': (), }"), "\0\0\xE0\x40"s);
  expect_tensor(parse("s.npy", scalar).tensors.at(0), "s", VCATTN_FP32, {}, "\0\0\xE0\x40"s);
  const std::string empty = npy(header("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 4), }"));
  expect_tensor(parse("e.npy", empty).tensors.at(0), "e", VCATTN_FP32, {0, 4}, "");
  // ml_dtypes.bfloat16; earlier releases wrote |V2.
  for (const std::string descr : {"<V2", "|V2"}) {
    const std::string bf16 =
        npy(header("{'descr': '" + descr + "', 'fortran_order': False, 'shape': (2,), }"), "\xC0\x3F\0\xC0"s);
    expect_tensor(parse("b.npy", bf16).tensors.at(0), "b", VCATTN_BF16, {2}, "\xC0\x3F\0\xC0"s);
  }
  for (const char major : {2, 3}) {
    const std::string dict = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }";
    const std::string content = npy(dict + std::string(115 - dict.size(), ' ') + "\n", "\0\0\x80\x3F"s, major);
    EXPECT_EQ(content.size() % 64, 4u);
    expect_tensor(parse("v.npy", content).tensors.at(0), "v", VCATTN_FP32, {1}, "\0\0\x80\x3F"s);
  }
}

TEST(Npy, ReadsTheDictInAnyOrderAndSpacing) {
  for (const std::string header : {
           "{'shape':(1,),'descr':'<f2','fortran_order':False}",
           "{ \"fortran_order\" : False , \"shape\" : ( 1 , ) , \"descr\" : \"<f2\" , }   \n",
           "{'descr': '<f2',\n 'fortran_order': False,\n\t'shape': (1,)}\n",
       }) {
    expect_tensor(parse("a.npy", npy(header, "\0\x3C"s)).tensors.at(0), "a", VCATTN_FP16, {1}, "\0\x3C"s);
  }
  const std::string trailing_comma = "{'descr': '<f2', 'fortran_order': False, 'shape': (1, 1,), }";
  EXPECT_EQ(parse("a.npy", npy(trailing_comma, "\0\x3C"s)).tensors.at(0).shape, (std::vector<int64_t>{1, 1}));
}

TEST(Safetensors, ReadsTheSamples) {
  struct Sample {
    const char* name;
    int64_t tokens;
    const char* grid;
  };
  for (const Sample& sample : {Sample{"qkv_layer6_4160", 4160, "8,16,32"}, {"qkv_layer2_16448", 16448, "32,16,32"}}) {
    const std::string path = std::string(VCATTN_TEST_DATA) + "/" + sample.name + ".safetensors";
    const TensorFile file = read_tensors(path, {"v", "q", "k"});
    EXPECT_EQ(file.metadata.at("video_grid"), sample.grid);
    ASSERT_EQ(file.tensors.size(), 3u);
    EXPECT_EQ(file.tensors[0].name, "v");
    for (const Tensor& tensor : file.tensors) {
      EXPECT_EQ(tensor.dtype, VCATTN_BF16);
      EXPECT_EQ(tensor.shape, (std::vector<int64_t>{1, 1, sample.tokens, 128}));
      EXPECT_EQ(tensor.data.size(), static_cast<size_t>(tensor.element_count()) * 2);
    }
    EXPECT_NE(file.tensors[0].data, file.tensors[1].data);
  }
}

// ---- what is refused ----------------------------------------------------------------------------------------------

struct BadInput {
  const char* name;
  std::string path;
  std::string content;
  std::vector<std::string> wanted;
  std::string message;  // a part of it
};
void PrintTo(const BadInput& input, std::ostream* out) { *out << input.name; }

std::string object(const std::string& members) { return fmt::format("{{{}}}", members); }
std::string tensor_a(const std::string& fields) { return fmt::format(R"({{"a":{{{}}}}})", fields); }

std::string many_tensors() {
  std::vector<std::string> members;
  for (int i = 0; i < 20; ++i) {
    members.push_back(fmt::format(R"("t{}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})", i));
  }
  return fmt::format("{{{}}}", fmt::join(members, ","));
}

std::string ones(int count) { return fmt::format("{}", fmt::join(std::vector<int>(count, 1), ",")); }

std::vector<BadInput> bad_safetensors() {
  const auto of = [](const char* name, std::string header, std::string message, std::string data = "") {
    return BadInput{name, "a.safetensors", safetensors(header, data), {}, std::move(message)};
  };
  const auto raw = [](const char* name, std::string content, std::string message) {
    return BadInput{name, "a.safetensors", std::move(content), {}, std::move(message)};
  };
  const auto shape = [&](const char* name, const std::string& extents, std::string message) {
    return of(name, tensor_a(R"("dtype":"F32","data_offsets":[0,0],"shape":)" + extents), std::move(message));
  };
  const auto offsets = [&](const char* name, const std::string& pair, std::string message) {
    return of(name, tensor_a(R"("dtype":"F32","shape":[2],"data_offsets":)" + pair), std::move(message), "12345678");
  };
  const std::string f16_a = R"("a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]})";
  const auto f16_b = [](const std::string& pair) {
    return R"("b":{"dtype":"F16","shape":[2],"data_offsets":)" + pair + "}";
  };
  const std::string whole = "expected whole numbers from 0 to 2^63 - 1, found ";
  return {
      raw("Empty", "", "expected 8 bytes of header length, found 0 bytes"),
      raw("SevenBytes", "1234567", "found 7 bytes"),
      raw("LengthPastEnd", little_endian(3, 8) + "{}", "expected a header of at most 2 bytes, found a length of 3"),
      raw("LengthHuge", little_endian(-1, 8) + "{}", "found a length of 18446744073709551615"),
      raw("NoHeader", little_endian(0, 8), "expected a header that starts with '{', found \"\""),
      of("NotAnObject", "[]", "starts with '{', found \"[]\""),
      of("LeadingSpace", " {}", "starts with '{', found \" {}\""),
      of("ByteOrderMark", "\xEF\xBB\xBF{}", "starts with '{'"),
      of("CutJson", R"({"a":)", "header byte 5: expected JSON in UTF-8, found"),
      of("TwoDocuments", "{}{}", "header byte 2: expected JSON"),
      of("Comment", "{/**/}", "expected JSON"),
      of("NulPadding", "{}\0"s, "header byte 2: expected JSON in UTF-8, found a NUL byte"),
      of("NulHidesRest", "{}\0{"s, "header byte 2: expected JSON in UTF-8, found a NUL byte"),
      of("InvalidUtf8", "{\"\xFF\":{}}", "expected JSON in UTF-8, found \"\\\""),
      of("LoneSurrogate", R"({"\ud800":{}})", "expected JSON in UTF-8"),
      of("DeepArrays", "{\"a\":" + std::string(1'000'000, '['), "\"a\": expected an object, found an array"),
      of("DeepObjects", R"({"a":{"dtype":{"a":{"a":{)", "tensor \"a\": dtype: expected a string, found an object"),
      of("DeepShape", tensor_a(R"("shape":[[[1]]])"),
         "tensor \"a\": shape: expected whole numbers from 0 to 2^63 - 1, found an array"),
      of("RepeatedTensor", object(f16_a + "," + f16_a), "expected each name once, found \"a\" twice", "1234"),
      of("RepeatedTensorByEscape", object(f16_a + R"(,"\u0061":{})"), "expected each name once, found \"a\" twice",
         "1234"),
      of("RepeatedMetadata", R"({"__metadata__":{},"__metadata__":{}})", "found \"__metadata__\" twice"),
      of("RepeatedMetadataKey", R"({"__metadata__":{"k":"1","k":"2"}})",
         "__metadata__: expected each key once, found \"k\" twice"),
      of("RepeatedField", tensor_a(R"("dtype":"F32","dtype":"F16")"), "tensor \"a\": expected dtype once"),
      of("MetadataNumber", R"({"__metadata__":{"k":1}})", "__metadata__ \"k\": expected a string, found 1"),
      of("MetadataNull", R"({"__metadata__":null})", "\"__metadata__\": expected an object, found null"),
      of("MetadataNested", R"({"__metadata__":{"k":{}}})", "__metadata__ \"k\": expected a string, found an object"),
      of("TensorIsText", R"({"a":"b"})", "\"a\": expected an object, found \"b\""),
      of("UnknownField", tensor_a(R"("stride":[1])"), "expected dtype, shape and data_offsets, found \"stride\""),
      of("NoShape", tensor_a(R"("dtype":"F32","data_offsets":[0,0])"), "tensor \"a\": expected shape, found none"),
      of("DtypeNumber", tensor_a(R"("dtype":32)"), "tensor \"a\": dtype: expected a string, found 32"),
      of("ShapeText", tensor_a(R"("shape":"1")"), "tensor \"a\": shape: expected an array, found \"1\""),
      shape("NegativeExtent", "[-1]", whole + "-1"),
      shape("MinusZero", "[-0]", whole + "0"),
      shape("FractionalExtent", "[1.5]", whole + "\"1.5\""),
      shape("ExponentExtent", "[1e2]", whole + "\"1e2\""),
      shape("InfiniteExtent", "[1e999]", "expected JSON in UTF-8, found \"1e999\""),
      shape("BooleanExtent", "[true]", whole + "true"),
      shape("ExtentOf2To63", "[9223372036854775808]", whole + "9223372036854775808"),
      shape("ExtentOf2To64", "[18446744073709551616]", whole + "\"18446744073709551616\""),
      shape("ProductOverflow", "[4294967296,4294967296]",
            "tensor \"a\": expected fewer than 2^63 bytes, found shape [4294967296, 4294967296]"),
      shape("ProductOverflowOfEmpty", "[9223372036854775807,3,0]", "expected fewer than 2^63 bytes"),
      shape("ByteCountOverflow", "[2305843009213693952]", "expected fewer than 2^63 bytes"),
      shape("HighRank", fmt::format("[{}]", ones(65)), "tensor \"a\": expected at most 64 extents, found more"),
      shape("ShownShapeIsCut", fmt::format("[{}]", ones(20)),
            "expected 4 bytes for F32 [1, 1, 1, 1, 1, 1, 1, 1, ...], found 0"),
      offsets("PastEnd", "[0,9]", "tensor \"a\": expected data_offsets within 8 bytes of data, found [0, 9]"),
      offsets("FarPastEnd", "[18446744073709551608,18446744073709551615]",
              "within 8 bytes of data, found [18446744073709551608, "),
      offsets("Backwards", "[8,0]", "within 8 bytes of data, found [8, 0]"),
      offsets("OneOffset", "[0]", "data_offsets: expected two whole numbers, found fewer"),
      offsets("ThreeOffsets", "[0,8,8]", "data_offsets: expected two whole numbers, found 8"),
      offsets("NegativeOffset", "[-8,0]", "data_offsets: expected two whole numbers, found -8"),
      offsets("WrongSize", "[0,4]", "expected 4 bytes of data, found 8"),
      of("ShapeSmallerThanData", tensor_a(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"),
         "tensor \"a\": expected 8 bytes for F32 [2], found 4", "1234"),
      of("Overlap", object(f16_a + "," + f16_b("[2,6]")),
         "tensor \"b\": expected its data at byte 4, found them at 2, which leaves an overlap", "123456"),
      of("Hole", object(f16_a + "," + f16_b("[6,10]")),
         "tensor \"b\": expected its data at byte 4, found them at 6, which leaves a hole", "1234567890"),
      of("HoleAtStart", object(f16_b("[2,6]")), "expected its data at byte 0, found them at 2", "123456"),
      of("DataWithoutTensors", "{}", "expected 0 bytes of data, found 1", "1"),
      {"Missing",
       "a.safetensors",
       safetensors(object(f16_a + "," + f16_b("[4,8]")), "12345678"),
       {"a", "q"},
       "a.safetensors: expected a tensor \"q\", found \"a\", \"b\""},
      {"MissingOfMany", "a.safetensors", safetensors(many_tensors()), {"q"}, "\"t6\", \"t7\" and 12 more"},
      {"MissingOfNone", "a.safetensors", safetensors("{}"), {"q"}, "expected a tensor \"q\", found no tensors"},
      {"WantedDtype",
       "a.safetensors",
       kSafetensorsFile,
       {"i"},
       "tensor \"i\": expected dtype BF16, F16 or F32, found \"I8\""},
      {"UnknownDtype",
       "a.safetensors",
       safetensors(tensor_a(R"("dtype":"F33","shape":[1],"data_offsets":[0,4])"), "1234"),
       {"a"},
       "expected dtype BF16, F16 or F32, found \"F33\""},
  };
}

std::vector<BadInput> bad_npy() {
  const auto raw = [](const char* name, std::string content, std::string message) {
    return BadInput{name, "a.npy", std::move(content), {}, std::move(message)};
  };
  const auto of = [&](const char* name, const std::string& header, std::string message, const std::string& data = "") {
    return raw(name, npy(header, data), std::move(message));
  };
  const auto descr = [&](const char* name, const std::string& value, std::string message) {
    return of(name, "{'descr': " + value + ", 'fortran_order': False, 'shape': (1,), }", std::move(message), "1234");
  };
  const auto shape = [&](const char* name, const std::string& value, std::string message) {
    return of(name, "{'descr': '<f4', 'fortran_order': False, 'shape': " + value + ", }", std::move(message), "1234");
  };
  const std::string whole = "expected a whole number from 0 to 2^63 - 1, found ";
  return {
      raw("Empty", "", "expected a .npy file, found no bytes"),
      raw("OtherMagic", "\x93NUMPZ123456789", "expected a .npy file, found \"\\x93NUMPZ\""),
      raw("OnlyMagic", "\x93NUMPY", "found the end of the file after 6 bytes"),
      raw("NoLength", "\x93NUMPY\x02\0abc"s, "found the end of the file after 11 bytes"),
      raw("Version4", npy("", "", 4), "expected .npy version 1.0, 2.0 or 3.0, found 4.0"),
      raw("Version1Dot1", "\x93NUMPY\x01\x01\0\0"s, "found 1.1"),
      raw("LengthPastEnd", "\x93NUMPY\x01\0\x09\0{}"s, "expected a header of 9 bytes, found 2 in the file"),
      raw("LengthHuge", "\x93NUMPY\x03\0\xFF\xFF\xFF\xFF{}"s,
          "expected a header of 4294967295 bytes, found 2 in the file"),
      of("EmptyHeader", "", "header byte 0: expected '{', found its end"),
      of("NoKeys", "{}", "expected the key \"descr\", found none"),
      of("LoneComma", "{,}", "header byte 1: expected a key, found \",}\""),
      of("UnclosedDict", "{'descr': '<f4'", "header byte 15: expected ',', found its end"),
      of("UnclosedString", "{'descr", "header byte 1: expected a key"),
      of("Expression", "{'descr': '<f' + '4'", "header byte 15: expected ',', found \"+ '4'\""),
      of("Escape", "{'de\\x73cr': '<f4'}", "expected a string without escapes"),
      of("AfterTheDict", "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} x",
         "expected spaces to the end, found \"x\"", "1234"),
      of("RepeatedKey", "{'descr': '<f4', 'descr': '<f4'}", "expected each key once, found \"descr\" twice"),
      of("OtherKey", "{'descr': '<f4', 'stride': 1}", "expected descr, fortran_order and shape, found \"stride\""),
      of("NoShape", "{'descr': '<f4', 'fortran_order': False}", "expected the key \"shape\", found none"),
      of("FortranNumber", "{'fortran_order': 0}", "expected True or False, found \"0}\""),
      of("Fortran", "{'descr': '<f4', 'fortran_order': True, 'shape': (1, 1), }",
         "expected C order, found fortran_order True; save numpy.ascontiguousarray(array)", "1234"),
      descr("BigEndian", "'>f4'", "expected little-endian data, found big-endian \">f4\""),
      descr("Float64", "'<f8'", "(float64); save it as .astype(numpy.float32)"),
      descr("Int32", "'<i4'", "expected dtype '<f4', '<f2' or '|V2' (bfloat16), found \"<i4\""),
      descr("Object", "'|O'", "found \"|O\""),
      descr("Void4", "'|V4'", "found \"|V4\""),
      descr("Structured", "[('a', '<f4')]", "expected a dtype such as '<f4', found \"[('a', '<f4')]"),
      shape("NoTuple", "(1)", "expected ',' as in a tuple, found \")"),
      shape("List", "[1]", "expected '(', found \"[1]"),
      shape("OnlyComma", "(,)", whole + "\",)"),
      shape("TwoCommas", "(1,,)", whole + "\",)"),
      shape("NoComma", "(1, 1 1)", "expected ',' or ')', found \"1)"),
      shape("Unclosed", "(1, ", whole + "\", }\""),
      shape("Negative", "(-1,)", whole + "\"-1"),
      shape("MinusZero", "(-0,)", whole + "\"-0"),
      shape("Plus", "(+1,)", whole + "\"+1"),
      shape("Fraction", "(1.0,)", "expected ',' as in a tuple, found \".0"),
      shape("LeadingZero", "(01,)", whole + "\"01"),
      shape("ExtentOf2To63", "(9223372036854775808,)", whole + "\"9223372036854775808"),
      shape("ProductOverflow", "(4294967296, 4294967296)",
            "expected fewer than 2^63 bytes, found shape [4294967296, 4294967296]"),
      shape("HighRank", fmt::format("({})", ones(65)), "expected at most 64 extents, found more"),
      shape("TooLittleData", "(2,)", "expected 8 bytes of data for FP32 [2], found 4"),
      shape("TooMuchData", "(0,)", "expected 0 bytes of data for FP32 [0], found 4"),
  };
}

class BadInputTest : public testing::TestWithParam<BadInput> {};

TEST_P(BadInputTest, IsRefusedInOneLine) {
  const BadInput& input = GetParam();
  const std::string message = error_of([&] { parse(input.path, input.content, input.wanted); });
  EXPECT_NE(message.find(input.message), std::string::npos) << "expected: " << input.message << "\nfound: " << message;
  EXPECT_TRUE(message.starts_with(input.path + ": ")) << message;
  EXPECT_LT(message.size(), 300u) << message;
}

std::string name_of(const testing::TestParamInfo<BadInput>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Safetensors, BadInputTest, testing::ValuesIn(bad_safetensors()), name_of);
INSTANTIATE_TEST_SUITE_P(Npy, BadInputTest, testing::ValuesIn(bad_npy()), name_of);

TEST(Safetensors, RefusesAHeaderOverTheLimit) {
  std::vector<std::byte> bytes(8 + 100'000'001);
  const std::vector<std::byte> length = bytes_of(little_endian(bytes.size() - 8, 8));
  std::copy(length.begin(), length.end(), bytes.begin());
  EXPECT_EQ(error_of([&] { parse_safetensors(bytes, "a"); }),
            "a: expected a header of at most 100000000 bytes, found a length of 100000001");
}

TEST(Messages, ShowHostileNamesOnOneBoundedLine) {
  const std::string header = R"({"a\n\u001b[31m\u0000\u202e)" + std::string(100'000, 'x') + R"(":1})";
  const std::string message = error_of([&] { parse("dir/a\nb.safetensors", safetensors(header)); });
  EXPECT_TRUE(message.starts_with(R"(dir/a\nb.safetensors: "a\n\x1b[31m\x00\u202exxx)")) << message;
  EXPECT_TRUE(message.ends_with("x\"...: expected an object, found 1")) << message;
  EXPECT_LT(message.size(), 250u);
}

TEST(Messages, CutLongPathsAtTheFront) {
  const std::string message = error_of([&] { parse(std::string(5000, 'd') + "/a.npy", ""); });
  EXPECT_TRUE(message.starts_with("...ddd")) << message;
  EXPECT_NE(message.find("d/a.npy: expected"), std::string::npos) << message;
  EXPECT_LT(message.size(), 350u);
}

}  // namespace
}  // namespace vcattn::io
