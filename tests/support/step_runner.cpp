// Runs one step of a program that another machine has written down: step_runner LIBRARY STEP
// RESULT. With the library alone, prints what it says of the CPU. The file is what
// `tests/support/step_export.py` writes: little-endian int64 numbers and bytes.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <dlfcn.h>

namespace {

FILE* file;

int64_t number() {
    int64_t value;
    if (fread(&value, 8, 1, file) != 1) exit(3);
    return value;
}

// Aligned to 64, with room behind that vector loads may touch.
char* bytes(int64_t size) {
    char* memory = static_cast<char*>(aligned_alloc(64, (size + 4096 + 63) / 64 * 64));
    memset(memory, 0, size + 4096);
    if (size && fread(memory, size, 1, file) != 1) exit(3);
    return memory;
}

template <typename F>
F* find(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (!found) exit(4);
    return reinterpret_cast<F*>(found);
}

}  // namespace

int main(int count_given, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    if (count_given == 2) return printf("%d\n", find<int()>(library, "sylvan_cpu")()) < 0;
    if (find<int()>(library, "sylvan_start")()) return 5;
    find<void(int)>(library, "sylvan_threads")(2);
    file = fopen(arguments[2], "rb");
    int64_t page_bytes = number();
    char* pages = bytes(page_bytes);
    int64_t count = number(), out = number(), out_bytes = number();
    std::vector<void*> table;
    for (int64_t i = 0; i < count; i++) {
        int64_t size = number();  // of an entry of its own; else where it is in the pages
        table.push_back(size >= 0 ? bytes(size) : pages + ~size);
    }
    int64_t records = number();
    char* ops = bytes(number());
    char* run = bytes(number());
    int64_t arrays = number();
    for (int64_t i = 0; i < arrays; i++) {
        int64_t field = number();  // of the run, which points at it
        char* array = bytes(number());
        memcpy(run + field, &array, sizeof array);
    }
    using New = void*(const void*, int, void*, int);
    void* program = find<New>(library, "sylvan_program_new")(ops, records, table.data(), count);
    find<int(void*, const void*)>(library, "sylvan_program_run")(program, run);
    FILE* result = fopen(arguments[3], "wb");
    fwrite(table[out], out_bytes, 1, result);
    fwrite(pages, page_bytes, 1, result);
    return fclose(result);
}
